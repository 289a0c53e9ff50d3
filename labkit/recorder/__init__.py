"""The recorder: what PyTorch code did with memory, operators and messages.

    with Recorder(watch=[model, optimizer, batch]) as rec:
        with rec.phase("forward"):
            loss = model(batch).mean()
    rec.recording.peak_bytes

A storage's category is for people. Watched (or seen as) `Parameter`s are parameters, what their `.grad` holds is
gradients, what `optimizer.state` holds is optimizer state, watched plain tensors are input data; these labels count for
the storage's whole life. An activation is the output of a forward operator (first run or recomputation) that autograd
records, or, where autograd is off, one computed from activations or inputs. All else is other.
"""

from .categories import CATEGORIES
from .recorder import Recorder
from .recording import CommInfo, OpInfo, Recording, StorageInfo, human_bytes

__all__ = ["CATEGORIES", "CommInfo", "OpInfo", "Recorder", "Recording", "StorageInfo", "human_bytes"]
