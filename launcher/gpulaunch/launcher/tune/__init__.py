"""Tries changes of a training job in short trials, and measures what each gains."""
