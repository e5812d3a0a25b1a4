"""The model repository: versions on disk, versions in memory, and the changes between them.

`names`, `manifest` and `aliases` define the content of a repository; `fs`, `journal` and `store` make it durable;
`lifecycle`, `policy` and `registry` define what is served; `rollout` makes the changes.
"""
