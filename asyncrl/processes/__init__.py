"""Actor clients and task helpers, used by every process of a run."""
