"""HiSpec inside engines that are not ours, such as Ray. Each module needs an extra of its own; nothing else of `infer`
imports any of them."""
