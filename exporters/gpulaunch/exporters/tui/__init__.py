"""The terminal UI: pure frames (`frame`), and a thin application that shows them and handles keys (`app`)."""
