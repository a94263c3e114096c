"""Demand files: YAML with one or more demands, checked so that a wrong one says line, field and what was expected.

documents   files and texts -> demands, or all problems of all files at once
demand      the fields of a demand, component by component
fields      reading YAML nodes without losing where they stood
problem     one thing that is wrong, with its place
"""

from rigbook.demandfile.documents import DemandFileError, FiledDemand, read_files, read_text
from rigbook.demandfile.problem import Problem

__all__ = ["DemandFileError", "FiledDemand", "Problem", "read_files", "read_text"]
