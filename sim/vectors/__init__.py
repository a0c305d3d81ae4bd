"""covey-vectors: exact cases from a folder of JSON files, replayed through the product's own policies."""
