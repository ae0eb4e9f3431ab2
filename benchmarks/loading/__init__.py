"""Parts of ``benchmarks/loader.py``: inputs, measured processes, and the two sides that are not ddpdoctor."""
