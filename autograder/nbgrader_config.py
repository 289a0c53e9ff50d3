# Settings of the nbgrader course folder. `python -m autograder course` writes this file there with the two names below
# filled in; put settings of your own into nbgrader_local.py beside it, which is read last and never overwritten.
import os
import sys
from pathlib import Path

PROJECT = Path("@PROJECT@")
COURSE = Path("@COURSE@")
sys.path.insert(0, str(PROJECT))
# Hidden checks import autograder.exams: in kernels too, whoever starts them from here.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
# nbgrader starts `alembic` by its bare name when it makes a gradebook.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

from nbconvert.preprocessors import ClearMetadataPreprocessor, CSSHTMLHeaderPreprocessor  # noqa: E402
from nbgrader.preprocessors import (  # noqa: E402
    AssignLatePenalties,
    CheckCellMetadata,
    ClearOutput,
    GetGrades,
    IgnorePattern,
    LimitOutput,
)

from autograder.build.preprocessors import RELEASE_PREPROCESSORS  # noqa: E402
from autograder.engine import ExecuteSubmission  # noqa: E402
from autograder.steps import JudgeCells, RepairSubmission, SaveScores, ShowFeedback  # noqa: E402

c = get_config()  # noqa: F821

c.CourseDirectory.root = str(COURSE)
c.CourseDirectory.course_id = "labkit"
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__"]

# The Assignment List finds the exchange here; learners on other accounts need a folder that all can write.
c.Exchange.root = os.environ.get("LABKIT_EXCHANGE", str(COURSE / "exchange"))
c.ExchangeSubmit.strict = True

c.GenerateAssignment.preprocessors = RELEASE_PREPROCESSORS

# Repair replaces DeduplicateIds, OverwriteKernelspec and OverwriteCells: a copied or missing cell stops nothing.
c.Autograde.sanitize_preprocessors = [ClearOutput, RepairSubmission, CheckCellMetadata]
# Outputs are cut before they are judged; scores are saved from the judge, not from text, before penalties look at them.
c.Autograde.autograde_preprocessors = [
    ExecuteSubmission,
    IgnorePattern,
    ClearMetadataPreprocessor,
    LimitOutput,
    JudgeCells,
    SaveScores,
    AssignLatePenalties,
    CheckCellMetadata,
]
c.GenerateFeedback.preprocessors = [GetGrades, ShowFeedback, CSSHTMLHeaderPreprocessor]

c.Execute.timeout = 60  # seconds a cell: the longest honest one takes 20, a check gives up after 30
c.Execute.shutdown_kernel = "immediate"
c.ExecuteSubmission.notebook_timeout = 900  # seconds a notebook

# What a library writes to stderr never changes a score, also where nbgrader itself counts (Validate, the Formgrader).
c.IgnorePattern.enabled = True
c.IgnorePattern.pattern = r"[\s\S]"
c.OverwriteCells.add_missing_cells = True

if (COURSE / "nbgrader_local.py").exists():
    load_subconfig(str(COURSE / "nbgrader_local.py"))  # noqa: F821
