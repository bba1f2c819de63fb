"""Peers of Penstock, each a self-contained program in the idiom of its engine.

They are run by path, with an interpreter that has `requirements.txt` installed, and import nothing
from Penstock or from each other: each is what its users would write, to be read from top to bottom.
The last line that a peer prints is a JSON object; its `job_s` excludes the start of interpreter and
engine.
"""
