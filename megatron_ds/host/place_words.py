"""Words and numbers that a rank writes to its file of places, and with which its programs ask for them."""

NOT_WAITING = 0
FOR_RANKS = 1
FOR_DEVICE = 2
# Phases. Only the first two are quick in any run: what a program around an engine does is not known.
TRAINING = "training"
PROGRAM = "program"
