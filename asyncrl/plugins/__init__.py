"""How a run finds its parts: by a registered name, or by an import path."""
