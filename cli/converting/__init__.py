"""A conversion: from a folder of another program to committed parts."""
