"""The Python that runs a submitted command, and whether it has covey-job."""
