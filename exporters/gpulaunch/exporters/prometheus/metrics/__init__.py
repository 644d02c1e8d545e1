"""The rooms of the catalogue, one for each domain; `catalogue` joins them."""
