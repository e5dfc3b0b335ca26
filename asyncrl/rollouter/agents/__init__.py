"""Agent loops: how one sample is made, in a single turn or in several with an environment."""
