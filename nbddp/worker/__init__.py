"""Everything that runs in a rank. Never imports IPython, ipywidgets, traitlets or zmq."""
