"""Real programs of drawn shape, run on CPU ranks over Gloo with and without their faults."""
