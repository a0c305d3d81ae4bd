"""Input data of a job, in Blocks that move with the ranks that they belong to (`covey.job.blocks.data_blocks`)."""
