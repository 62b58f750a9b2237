"""From words to options, before anything heavy is loaded."""
