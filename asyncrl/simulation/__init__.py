"""A run without hardware: the real control plane under a virtual clock, against models of engines and ranks.

The rollout loop, the router, the queue's core with its admission, the training loop and the sync sessions are those of
a run, unchanged. Engines, ranks, rewards and the journal's disk are a few measured figures each (`profile`). No thread
runs, nothing is read from the system's clock, and an equal seed gives an equal run.
"""
