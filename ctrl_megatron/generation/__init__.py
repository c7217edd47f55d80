"""Generation outside of training: chat models, first solutions, search trees, the critic's
service.
"""
