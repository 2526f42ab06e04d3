"""What capture from any engine needs: what a request asks for, whole samples out of pieces, a bounded writing thread.

No engine is imported here.
"""
