"""Reads every weight format of the field into a ViT, and writes a ViT in most of them.

`load` reads and `writers` writes. `names` maps the other formats' names to ours, `formats` recognises and reads those
formats, `config` finds out what a checkpoint says about its model, and `files` reads and writes bytes.
"""
