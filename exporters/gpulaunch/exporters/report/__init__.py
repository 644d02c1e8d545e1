"""The report of a run, largest losses first, and the comparison of two runs."""
