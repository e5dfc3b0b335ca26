"""Surrogates: the loss of a token, given its advantage and the policies that it is compared with."""
