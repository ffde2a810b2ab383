"""Figures as ratios against hand-written peers, measured in one run on one machine: `make bench`."""
