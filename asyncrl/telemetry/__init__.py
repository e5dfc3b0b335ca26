"""The clock, spans, counters and the one metrics sink's interface."""
