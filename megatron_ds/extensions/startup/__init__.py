"""What a run is: the text that it logs before its first step."""
