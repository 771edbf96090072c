"""Arrays and tables in files: `.npy`, `.npz`, `.csv` and `.parquet`."""
