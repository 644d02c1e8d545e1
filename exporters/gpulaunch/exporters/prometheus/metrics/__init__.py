"""The rows of the catalogue, one module per domain; `catalogue` joins them."""
