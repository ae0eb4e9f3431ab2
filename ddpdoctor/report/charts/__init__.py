"""Computes the geometry of charts: percentages, pixels and path data, which the templates place into inline SVG.

The charts need no JavaScript, so they also work in print and in mail clients. Horizontal coordinates are percentages and text has a
fixed size, so that a chart fits wide and narrow screens.
"""
