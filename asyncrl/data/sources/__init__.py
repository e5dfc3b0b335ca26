"""Sources that generate prompts: a module each, and what they have in common in `base`."""
