"""Peers of Penstock, each a program of its own in the words of its engine.

They are run by path with an interpreter that has `requirements.txt`, and import nothing of Penstock
nor of each other: each is what its users would write, to be read from top to bottom. The last line
that one prints is a JSON object; `job_s` in it leaves the start of interpreter and engine out.
"""
