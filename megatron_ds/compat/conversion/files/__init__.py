"""Files below the formats: torch files, pickles, safetensors and torch_dist folders. Reading executes
nothing."""
