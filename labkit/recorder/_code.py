"""How one 64-bit integer says where something happened: operator, phase, module, category and flags.

Packing them lets the recorder write a whole row with one ``struct`` call, which is what keeps it cheap.
"""

from struct import Struct

PHASE_SHIFT, MODULE_SHIFT, CATEGORY_SHIFT = 16, 32, 52
OP_MASK, PHASE_MASK, MODULE_MASK, CATEGORY_MASK = 0xFFFF, 0xFFFF, 0xFFFFF, 0xF
IN_BACKWARD, RECOMPUTE, FIRST_SEEN, COLLECTED, RESIZED, FREED, ON_CARD = (1 << bit for bit in range(56, 63))

# Rows of the buffers, and their columns as numpy sees them. Seconds count from the recorder's start.
EVENT = Struct("=qqqd")
EVENT_COLUMNS = [("sid", "i8"), ("delta", "i8"), ("code", "i8"), ("seconds", "f8")]
OP = Struct("=qddq")
OP_COLUMNS = [("code", "i8"), ("start", "f8"), ("seconds", "f8"), ("flops", "i8")]
CALL = Struct("=qdd")
CALL_COLUMNS = [("code", "i8"), ("start", "f8"), ("seconds", "f8")]
