"""Prepares data sets: published problem sets, mutants, synthesised critiques. Writes files and
never trains.
"""
