"""How one sample comes about: a single answer, or several turns with an environment."""
