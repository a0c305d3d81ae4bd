"""The borrowing half of a host: where the slabs of its volumes are."""
