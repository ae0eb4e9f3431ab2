"""How near its constants an answer stands: each is moved by 30 % either way, and what then changes is listed.

``python -m tests.sweep`` reads many jobs once and measures them again for each constant that was looked at in doing so. It tells
which decisions are cliffs, never which side of one is right: that is for the tests that know the truth.
"""
