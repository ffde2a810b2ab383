"""The supervisor: one process per run, warm before it is asked, that starts the ranks, watches them and says how the run ended.

Started by the kernel as ``python -m nbddp.supervisor``; imports neither IPython nor ipywidgets.
"""
