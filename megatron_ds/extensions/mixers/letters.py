"""The characters of layers of a hybrid model, and the values of options of mixers."""

MAMBA = "M"
DELTA = "G"
ATTENTION = "*"
FEED_FORWARD = "-"
EXPERTS = "E"
SIDE_BY_SIDE = "+"  # Mamba-2 beside attention, of whole blocks alone
# --linear-attention-type → the character.
STATES = {
    "gated_delta_net": DELTA,
    "mamba": MAMBA,
    "mamba_beside_attention": SIDE_BY_SIDE,
}
# --mamba-norm: the norm of the gated result, the norm before the gate, none.
NORMS = ("gated", "before_gate", "none")
FACTORS = 11
