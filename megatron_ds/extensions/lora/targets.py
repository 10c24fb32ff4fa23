"""Names of the layers that may have an adapter, and the rows of a layer's output that each name means.

linear_qkv   | q q k v | q q k v | ..    all rows: linear_qkv        some: q_proj, k_proj, v_proj
linear_fc1   | gate .. | up ..   |       all rows: linear_fc1        some: gate_proj, up_proj

What is no self-attention has layers of its own (`models.mixers.Mixer.linear_layers`), each a target by
its name.
"""

from dataclasses import dataclass

from ...mpu.param_spec import ParamSpec


@dataclass(frozen=True)
class Target:
    """layer: name of the linear layer. part: of its packed rows; None: all of them."""

    layer: str
    part: int | None = None


TARGETS = {
    "linear_qkv": Target("linear_qkv"),
    "linear_proj": Target("linear_proj"),
    "linear_fc1": Target("linear_fc1"),
    "linear_fc2": Target("linear_fc2"),
    "q_proj": Target("linear_qkv", 0),
    "k_proj": Target("linear_qkv", 1),
    "v_proj": Target("linear_qkv", 2),
    "o_proj": Target("linear_proj"),
    "linear_q_proj": Target("linear_q_proj"),
    "linear_q_down_proj": Target("linear_q_down_proj"),
    "linear_q_up_proj": Target("linear_q_up_proj"),
    "linear_kv_down_proj": Target("linear_kv_down_proj"),
    "linear_kv_up_proj": Target("linear_kv_up_proj"),
    "in_proj": Target("in_proj"),
    "out_proj": Target("out_proj"),
    "gate_proj": Target("linear_fc1", 0),
    "up_proj": Target("linear_fc1", 1),
    "down_proj": Target("linear_fc2"),
}
FEED_FORWARD = ("linear_fc1", "linear_fc2")
LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class PackedRows:
    """How the rows of a weight are packed: `groups` runs, each of which has `parts` of so many rows.

    splits  pieces of the rows that tensor-parallel ranks cut one by one
    """

    groups: int
    parts: tuple[int, ...]
    splits: int = 1

    @classmethod
    def of(cls, weight: ParamSpec) -> "PackedRows":
        """Return the packing of a linear layer's weight [rows, in] or of experts' [experts, rows, in]."""
        rows = weight.shape[-2]
        packed = weight.matrices
        if packed is not None and packed.parts:
            return cls(packed.groups, packed.parts)
        split = weight.tensor_split
        pieces = 1
        if split is not None and split.dim == len(weight.shape) - 2:
            pieces = split.parts
        return cls(1, (rows // pieces,) * pieces, pieces)

    def rows_of(self, part: int | None) -> int:
        """Rows of one part in all groups; None: of all parts."""
        return self.groups * (sum(self.parts) if part is None else self.parts[part])

    def place_of(self, part: int | None) -> slice:
        """Return the rows of one part in a group; None: those of all parts."""
        if part is None:
            return slice(0, sum(self.parts))
        start = sum(self.parts[:part])
        return slice(start, start + self.parts[part])

    def on_rank(self, rows: int) -> tuple[int, tuple[int, ...]]:
        """(groups, rows of each part in a group) of a rank that holds so many rows."""
        groups = max(self.groups * rows // self.rows_of(None), 1)
        total = sum(self.parts)
        return groups, tuple(rows // groups * part // total for part in self.parts)
