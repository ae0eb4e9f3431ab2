"""Tests of the measurement: hand-made inputs, generated traces whose truth is known, and public traces."""
