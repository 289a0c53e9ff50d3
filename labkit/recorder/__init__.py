"""The recorder: what PyTorch code did with memory, operators and messages.

    with Recorder(watch=[model, optimizer, batch]) as rec:
        with rec.phase("forward"):
            loss = model(batch).mean()
    rec.recording.peak_bytes

A storage's category is for people. Watched (or seen as) `Parameter`s are parameters, what their `.grad` holds is
gradients, what `optimizer.state` holds is optimizer state, watched plain tensors are input data; these labels count for
the storage's whole life. An activation is the output of a forward operator (first run or recomputation) that autograd
records, or, where autograd is off, one computed from activations or inputs. All else is other.

What it does not see: memory that an operator takes and gives back inside its own C++ (workspaces), and threads that were
already running when it started.
"""

from ._patches import note as note_message
from ._transit import Transit, note_event, set_simulated_link
from .categories import CATEGORIES
from .follow import Follower
from .infos import CallInfo, CommInfo, OpInfo, StorageInfo, human_bytes
from .recorder import Recorder
from .recording import Recording

__all__ = [
    "CATEGORIES",
    "CallInfo",
    "CommInfo",
    "Follower",
    "OpInfo",
    "Recorder",
    "Recording",
    "StorageInfo",
    "Transit",
    "human_bytes",
    "note_event",
    "note_message",
    "set_simulated_link",
]
