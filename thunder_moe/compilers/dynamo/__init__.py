"""The torch.compile side: backend.py is the entry point, rewrite.py changes the graph.
Called by torch.compile; calls the rewrite of this folder. Nothing is imported here.
"""
