"""Lab sources to solution notebooks, release notebooks and manifests, and the checks that hold them together."""

from autograder.build.builder import BuiltLab, build, build_lab
from autograder.build.source import SourceError, read_source

__all__ = ["BuiltLab", "SourceError", "build", "build_lab", "read_source"]
