"""Facts x rules -> findings. Knows no thresholds of its own: they stand in the rule files."""
