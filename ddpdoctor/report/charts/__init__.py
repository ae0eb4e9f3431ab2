"""Charts as geometry: percentages, pixels and path data that the templates place into inline SVG.

They need no JavaScript, so they also work on paper and in mail clients. Coordinates along the width are percentages and text keeps
its size, so that the same drawing fits wide and narrow screens.
"""
