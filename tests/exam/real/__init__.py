"""Real programs of random shape, run on CPU ranks over Gloo with and without their faults."""
