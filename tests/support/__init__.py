"""What the tests drive the real parts with: kernels, ranks, JupyterLab in Chromium, SLURM. Imported as `support`."""
