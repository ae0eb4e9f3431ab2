"""The gallery in the documentation: recorded jobs, their reports, and pictures of them. ``python -m tests.gallery`` makes all anew."""
