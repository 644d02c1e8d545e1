"""A run in a terminal: pure frames (`frame`), and a thin application that shows them and takes keys (`app`)."""
