"""Short programs that have what the rules find, what is reported for them, and their cure: for docs/findings.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Example:
    """One program."""

    program: str
    prints: str
    """The advice that a finding in it has; a test compares it with what the rule says."""
    cure: str
    """The changed lines, or the command."""


_LOOP: Final = "for x, y in loader:\n    loss = criterion(model(x), y)\n    loss.backward()\n    optimizer.step()\n"

EXAMPLES: Final = {
    "dataloader-too-few-workers": Example(
        program="class Images(Dataset):\n"
        "    def __getitem__(self, i):\n"
        "        return requests.get(self.urls[i]).content  # 5 ms\n\n\n"
        "loader = DataLoader(Images(), batch_size=32, num_workers=1)  # a batch takes 160 ms, a step 100 ms",
        prints="Set num_workers=2 (now 1) and persistent_workers=True, so that batches are ready when training needs "
        "them.",
        cure="loader = DataLoader(Images(), batch_size=32, num_workers=2, persistent_workers=True)",
    ),
    "dataloader-too-many-workers": Example(
        program="class InMemory(Dataset):\n"
        "    def __getitem__(self, i):\n"
        "        return {name: column[i] for name, column in self.columns.items()}  # 300 small tensors\n\n\n"
        "loader = DataLoader(InMemory(), batch_size=32, num_workers=2)",
        prints="Set num_workers=0, or collate each batch into a few large tensors: transferring a batch from a worker "
        "takes longer than preparing it.",
        cure="loader = DataLoader(InMemory(), batch_size=32, num_workers=0)",
    ),
    "dataloader-slow-storage": Example(
        program="class Images(Dataset):\n"
        "    def __getitem__(self, i):\n"
        '        return decode(open(f"/mnt/nfs/images/{i}.jpg", "rb").read())\n\n\n'
        "loader = DataLoader(Images(), batch_size=32, num_workers=4)",
        prints="Workers wait for storage. Move the data to a local disk or into memory, or read fewer and larger files "
        "sequentially. More workers hide the wait only if the storage can serve them in parallel.",
        cure="rsync -a /mnt/nfs/images/ /local/images/",
    ),
    "dataloader-slow-transform": Example(
        program="class Images(Dataset):\n"
        "    def __getitem__(self, i):\n"
        '        image = Image.open(self.paths[i]).convert("RGB")\n'
        "        return normalize(to_tensor(blur(image.resize((1024, 1024))).crop(BOX)))\n\n\n"
        "loader = DataLoader(Images(), batch_size=32, num_workers=os.cpu_count())",
        prints="Make the dataset's transforms cheaper: preprocess once and store the result, process whole batches at "
        "a time, or use the GPU. No core is free for more workers.",
        cure="return normalize(to_tensor(blur(image.crop(BOX).resize((224, 224)))))",
    ),
    "dataloader-head-of-line": Example(
        program="class Videos(Dataset):\n"
        "    def __getitem__(self, i):\n"
        "        return decode(self.paths[i])  # most in 50 ms, one of ten in a second\n\n\n"
        "loader = DataLoader(Videos(), num_workers=8)",
        prints="Set in_order=False if the order of batches does not matter, or use samples that take about equally "
        "long: finished batches wait for an earlier one that takes much longer.",
        cure="loader = DataLoader(Videos(), num_workers=8, in_order=False)",
    ),
    "dataloader-lock": Example(
        program="class Archive(Dataset):\n"
        "    def __getitem__(self, i):\n"
        "        with self.lock:  # a multiprocessing.Lock, as all workers share one handle\n"
        "            return decode(self.archive.read(self.names[i]))",
        prints="Do less while holding the lock, or give each worker a file or connection of its own, opened in "
        "worker_init_fn. More workers would wait for the same lock. To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="def worker_init_fn(_):\n    get_worker_info().dataset.archive = ZipFile(PATH)",
    ),
    "dataloader-pinned-workers": Example(
        program="# OMP_PROC_BIND=true in the job file: each process inherits the core of its parent\n"
        "loader = DataLoader(Images(), batch_size=32, num_workers=4)",
        prints="Let the workers run on all cores: they may use only 1 of 16. Look for sched_setaffinity, taskset, "
        "OMP_PROC_BIND, GOMP_CPU_AFFINITY or KMP_AFFINITY; os.sched_setaffinity(0, range(os.cpu_count())) in "
        "worker_init_fn undoes it.",
        cure="unset OMP_PROC_BIND",
    ),
    "dataloader-workers-restarted": Example(
        program='loader = DataLoader(dataset, batch_size=32, num_workers=8, multiprocessing_context="spawn")\n'
        "for epoch in range(300):\n"
        "    for batch in loader:  # 20 batches\n"
        "        step(batch)",
        prints="Set persistent_workers=True: every epoch stops its workers and starts them anew, which takes 1.6 s "
        "with the wait for its first batch.",
        cure="loader = DataLoader(..., persistent_workers=True)",
    ),
    "unpinned-copies": Example(
        program="loader = DataLoader(dataset, batch_size=256, num_workers=8)\n"
        "for x, y in loader:\n"
        "    loss = criterion(model(x.cuda()), y.cuda())",
        prints="Copy from pinned memory with non_blocking=True: set pin_memory=True on the DataLoader (train.py:41). "
        "Copies from pageable memory block the training thread. Do not call pin_memory() in the training loop: it "
        "copies, too.",
        cure="loader = DataLoader(dataset, batch_size=256, num_workers=8, pin_memory=True)\n"
        "for x, y in loader:\n"
        "    loss = criterion(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))",
    ),
    "blocking-copies": Example(
        program="loader = DataLoader(dataset, batch_size=256, pin_memory=True)\nfor x, y in loader:\n    x = x.cuda()",
        prints="Pass non_blocking=True: the memory is pinned, so the copy can overlap with computation.",
        cure="    x = x.cuda(non_blocking=True)",
    ),
    "sync-every-step": Example(
        program=_LOOP + "    total += loss.item()",
        prints="Keep the value on the GPU (accumulate with +=, detach()) and read it only every N steps: each read "
        "waits until the GPU has finished its queued work.",
        cure="    total += loss.detach()",
    ),
    "tensor-built-on-cpu": Example(
        program="for x in loader:\n    noise = torch.randn(x.shape).cuda()\n    loss = model(x + noise)",
        prints="Pass device=... when creating the tensor, so that it is not copied from the CPU.",
        cure="    noise = torch.randn(x.shape, device='cuda')",
    ),
    "dataparallel": Example(
        program="model = torch.nn.DataParallel(model)\n" + _LOOP,
        prints="Use DistributedDataParallel with one process per GPU (gpulaunch --nproc auto): DataParallel copies the "
        "model to each GPU at every step, and a single Python process drives all GPUs. To verify: gpulaunch trace "
        "--steps 5 --rank 0.",
        cure="torch.distributed.init_process_group()\nmodel = torch.nn.parallel.DistributedDataParallel(model)",
    ),
    "fp32-on-tensor-cores": Example(
        program=_LOOP,
        prints='Use the tensor cores for matrix multiplication: torch.set_float32_matmul_precision("high") for TF32, '
        "or torch.autocast with bfloat16. Then compare the loss curves. To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="with torch.autocast('cuda', torch.bfloat16):\n    loss = criterion(model(x), y)",
    ),
    "float64-parameters": Example(
        program="prices = torch.from_numpy(frame.to_numpy())  # float64, as NumPy's numbers are\n"
        "model = Model().double()  # expected Float but found Double",
        prints="Train in float32: convert the data (torch.as_tensor(array, dtype=torch.float32)), and do not call "
        ".double() on the model. Then compare the loss curves. To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="prices = torch.as_tensor(frame.to_numpy(), dtype=torch.float32)\nmodel = Model()",
    ),
    "padded-batches": Example(
        program='encoded = tokenizer(texts, truncation=True, max_length=512, padding="max_length")\n'
        "trainer = Trainer(model, args, train_dataset=Texts(encoded, labels))",
        prints='Pad each batch to its longest sample, not to 512 tokens (padding=True instead of "max_length", or '
        "DataCollatorWithPadding over samples that are not padded): no sample of a batch needs 71% of the columns. "
        "Batches of similar lengths (group_by_length) save more. To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="encoded = tokenizer(texts, truncation=True, max_length=512)\n"
        "trainer = Trainer(model, args, train_dataset=Texts(encoded, labels),\n"
        "                  data_collator=DataCollatorWithPadding(tokenizer))",
    ),
    "gradients-unused": Example(
        program="for x, y in loader:\n    soft = teacher(x)\n    distillation_loss(student(x), soft, y).backward()\n"
        "    optimizer.step()  # it has the student's parameters",
        prints="Parameters with 598,280 elements get gradients, but no optimizer has them (or only with lr=0), and "
        "they do not change: a teacher, or a frozen part of the model. Call it under torch.no_grad(), or set "
        "requires_grad_(False) for it. If it is to be trained, add its parameters to the optimizer. To verify: "
        "gpulaunch trace --steps 5 --rank 0.",
        cure="    with torch.no_grad():\n        soft = teacher(x)",
    ),
    "targets-ignored": Example(
        program="for ids, targets in loader:  # targets are -100 where no word was masked\n"
        "    scores = head(encoder(ids))\n"
        "    cross_entropy(scores.view(-1, words), targets.view(-1)).backward()",
        prints="The model computes scores for 1024 rows, of which its loss uses 154 (the others are "
        "ignored, as with the target -100, or left out): choose the rows before the head, hidden[targets != -100], and "
        "give the loss only those. To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="    asked = targets != -100\n    scores = head(encoder(ids)[asked])\n"
        "    cross_entropy(scores, targets[asked]).backward()",
    ),
    "gradients-cleared": Example(
        program="fake = generator(noise)\n"
        "loss_d = real_or_fake(discriminator(real), discriminator(fake))\n"
        "optimizer_d.zero_grad()\n"
        "loss_d.backward()\n"
        "optimizer_d.step()",
        prints="20% of backward computes gradients that are cleared before their optimizer steps: this pass goes on "
        "through another model, as a discriminator's through the generator. Give it that model's output detached: "
        "fake.detach(). To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="loss_d = real_or_fake(discriminator(real), discriminator(fake.detach()))",
    ),
    "backward-repeated": Example(
        program="features = trunk(x)\nfor head, y in zip(heads, ys):\n"
        "    criterion(head(features), y).backward(retain_graph=True)",
        prints="60% of backward goes again through what a pass before it has gone through (retain_graph=True, 4 passes "
        "per step). Unless you need the gradients of each loss by themselves, add the losses up and call backward "
        "once. If it is the state of a recurrent network that leads to earlier windows: hidden = hidden.detach(). To "
        "verify: gpulaunch trace --steps 5 --rank 0.",
        cure="loss = sum(criterion(head(features), y) for head, y in zip(heads, ys))\nloss.backward()",
    ),
    "embedding-gradient-dense": Example(
        program="songs = nn.Embedding(1_000_000, 64)\noptimizer = torch.optim.Adam([*songs.parameters(), "
        "*tower.parameters()])\nfor listened, y in loader:  # 512 songs\n"
        "    loss = criterion(tower(songs(listened)), y)",
        prints="99% of all parameters are rows of embeddings that a batch does not look up; their gradient is zero, "
        "and the optimizer updates them all the same. Use nn.Embedding(..., sparse=True), with torch.optim.SparseAdam, "
        "Adagrad or SGD for them. Then compare the loss curves. To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="songs = nn.Embedding(1_000_000, 64, sparse=True)\n"
        "optimizers = torch.optim.SparseAdam(songs.parameters()), torch.optim.Adam(tower.parameters())",
    ),
    "host-memory-growth": Example(
        program="history = []\n" + _LOOP + "    history.append(model(x))  # and with it the graph",
        prints="Look for objects kept from every step: a list of losses without .item(), or an unbounded cache.",
        cure="    history.append(loss.item())",
    ),
    "gpu-memory-growth": Example(
        program=_LOOP + "    total_loss = total_loss + loss",
        prints="Look for tensors kept from every step: a kept loss keeps its graph. Use detach() or .item().",
        cure="    total_loss = total_loss + loss.detach()",
    ),
    "gpu-memory-fragmented": Example(
        program="for batch in loader:  # as long as its longest sentence, another length at every step\n"
        "    loss = model(batch.cuda())",
        prints="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use batches of one shape: free memory is "
        "split into small blocks, and each retried allocation synchronizes with the GPU.",
        cure="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True gpulaunch train.py",
    ),
    "shm-nearly-full": Example(
        program="# docker run without --shm-size: /dev/shm has 64 MiB\n"
        "loader = DataLoader(dataset, batch_size=64, num_workers=8)  # 38 MiB a batch, two for each worker",
        prints="Enlarge /dev/shm (64 MiB by default in a container), or lower num_workers or prefetch_factor: when it "
        "is full, a rank is killed by SIGBUS.",
        cure="docker run --shm-size 8g ...",
    ),
    "straggler": Example(
        program="for batch in loader:  # sorted by length, every second one for this rank\n"
        "    loss = model(batch)  # rank 1 always has the longer ones",
        prints="Rank 1 is late at every step, and the other ranks wait for it; cause: compute. Give all ranks the same "
        "amount of computation (sequence lengths, padding). If they are the same, its GPU is slower: compare clocks "
        "and temperatures, or replace it.",
        cure="sampler = DistributedSampler(dataset, shuffle=True)",
    ),
    "dataloader-lists": Example(
        program="class Beats(Dataset):\n"
        "    def __getitem__(self, i):\n"
        '        return {"values": self.beats[i].tolist(), "label": self.labels[i]}',
        prints="The samples of the dataset have lists of Python numbers, which what collates converts one by one: that "
        'is 90% of a fetch. Return NumPy arrays or tensors (torch.from_numpy, dataset.with_format("torch")).',
        cure='        return {"values": self.beats[i], "label": self.labels[i]}  # a NumPy array',
    ),
    "dataloader-samples-dropped": Example(
        program="class Sweeps(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        for number, sweep in enumerate(self.sweeps):\n"
        "            grid = decode(sweep)\n"
        "            if number % self.world_size == self.rank:\n"
        "                yield grid",
        prints="This line prepares samples before those of other ranks or workers are dropped: that is 45% of a fetch. "
        "Drop them first, by their number, or give each its own files.",
        cure="            if number % self.world_size == self.rank:\n                yield decode(sweep)",
    ),
    "dataloader-one-rank": Example(
        program="accelerator = Accelerator()\n"
        "loader = accelerator.prepare(DataLoader(Clips(), batch_size=8))  # an IterableDataset\n"
        "for step, batch in enumerate(loader):\n"
        "    accelerator.backward(model(batch))",
        prints="Only rank 0 fetches batches, those of all ranks, and sends them: let the dataset of each rank yield "
        "only its own part. Accelerate does this to an IterableDataset: do not give its DataLoader to "
        "accelerator.prepare() then. If only one rank can read them, num_workers=1 fetches them ahead.",
        cure="clips = Clips(first=accelerator.process_index, every=accelerator.num_processes)\n"
        "loader = DataLoader(clips, batch_size=8)",
    ),
    "small-collectives": Example(
        program=_LOOP + "    for name, value in metrics.items():  # forty of them\n        dist.all_reduce(value)",
        prints="Combine those that do not need each other's results: put the numbers into one tensor and reduce it "
        "once per step; for a log, every N steps. Each call waits for all ranks, however little it transfers.",
        cure="    values = torch.stack(list(metrics.values()))\n    dist.all_reduce(values)",
    ),
    "redundant-all-reduce": Example(
        program="model = DistributedDataParallel(model)\n"
        "for x, y in loader:\n"
        "    criterion(model(x), y).backward()\n"
        "    for parameter in model.parameters():\n"
        "        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)\n"
        "    optimizer.step()",
        prints="Remove this all_reduce of 12.6 MB in a step: what it reduces is the same on all ranks already. "
        "DistributedDataParallel has averaged the gradients when backward returns; without it, give each rank samples "
        "of its own.",
        cure="    criterion(model(x), y).backward()\n    optimizer.step()",
    ),
    "fsdp-small-units": Example(
        program="for module in model.modules():\n"
        "    if isinstance(module, nn.Linear):\n"
        "        fully_shard(module)\n"
        "fully_shard(model)",
        prints="Shard larger units: FSDP gathers 13 times per step, each time only 32 KiB. Call fully_shard() for each "
        "block of the model and for the model, not for its single layers (FSDP1: an auto_wrap_policy of blocks). Each "
        "gather waits for all ranks, however little it transfers. To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="for block in model.blocks:\n    fully_shard(block)\nfully_shard(model)",
    ),
    "reduced-in-accumulation": Example(
        program="model = DistributedDataParallel(model)\n"
        "for step, batches in enumerate(loader):\n"
        "    for batch in batches:  # four\n"
        "        (model(batch) / 4).backward()\n"
        "    optimizer.step()",
        prints="Use model.no_sync() around the forward and backward passes of all but the last micro-batch: the "
        "gradients are reduced 4 times per step, and needed once.",
        cure="    for batch in batches[:-1]:\n"
        "        with model.no_sync():\n"
        "            (model(batch) / 4).backward()\n"
        "    (model(batches[-1]) / 4).backward()",
    ),
    "unused-parameters-searched": Example(
        program="model = DistributedDataParallel(model, find_unused_parameters=True)",
        prints="Remove find_unused_parameters=True: all ranks have used all parameters in every step so far. If the "
        "model may leave some out later, keep it; without it, DDP raises an error then. To verify: gpulaunch trace "
        "--steps 5 --rank 0.",
        cure="model = DistributedDataParallel(model)",
    ),
    "checkpoint-stall": Example(
        program=_LOOP + '    if step % 10 == 0:\n        torch.save(model.state_dict(), "last.pt")',
        prints="Save less often, or asynchronously: training is blocked during a save. Use "
        "torch.distributed.checkpoint.async_save, or gpulaunch.checkpoint, which writes in the background.",
        cure="    if step % 1000 == 0:\n        torch.save(model.state_dict(), 'last.pt')",
    ),
    "logging-stall": Example(
        program=_LOOP + '    logger.info("step %d: loss %f", step, loss)  # to a file in a network',
        prints="Log every N steps, or write in another thread (logging.handlers.QueueHandler).",
        cure="    if step % 100 == 0:\n        logger.info('step %d: loss %f', step, loss)",
    ),
    "hot-line": Example(
        program=_LOOP + "    best = copy.deepcopy(model) if loss < lowest else best",
        prints="copy.deepcopy runs on the training thread outside of the model. Copy every N steps; for an average of "
        "the weights, update it in place every few steps.",
        cure="    if step % 500 == 0 and loss < lowest:\n        best = copy.deepcopy(model)",
    ),
    "small-operations-loop": Example(
        program="for anchor, person in zip(faces, people):\n"
        "    distance = (faces - anchor).square().sum(1)\n"
        "    losses.append(distance[people == person].max() - distance[people != person].min())\n"
        "loss = torch.stack(losses).mean()",
        prints="Compute the whole batch with one operation (broadcasting, indexing with a tensor, a masked reduction, "
        "torch.vmap): this loop computes element by element. With its part of backward it is 61% of the step, and the "
        "graph has 2000 nodes of 10 us each. Such small operations are mostly torch's own work; on a GPU each is a "
        "kernel launch. To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="distance = (faces[:, None] - faces[None]).square().sum(2)\n"
        "same = people[:, None] == people[None]\n"
        "far = distance.masked_fill(~same, -1.0).amax(1)\n"
        "loss = (far - distance.masked_fill(same, 1e9).amin(1)).mean()",
    ),
    "gil-contention": Example(
        program="def watch(rewards):  # threading.Thread(target=watch, args=(rewards,), daemon=True).start()\n"
        "    while True:\n"
        "        show(statistics.quantiles(list(rewards), n=20))  # of 60,000 values: 40 ms\n"
        "        time.sleep(0.02)",
        prints="Another thread computes in Python and keeps the GIL, and the training thread waits for it. Do it in "
        "another process (multiprocessing), less often, or with code that releases the GIL (NumPy). To verify: "
        "gpulaunch trace --steps 5 --rank 0.",
        cure="        time.sleep(5)",
    ),
    "omp-oversubscribed": Example(
        program="torch.set_num_threads(32)  # in each of eight ranks, on 128 cores\n" + _LOOP,
        prints="Use 16 threads per rank: 32 threads share 16 cores. Let gpulaunch set OMP_NUM_THREADS, and remove "
        "torch.set_num_threads. To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="gpulaunch --nproc 8 train.py  # without that line",
    ),
    "frequent-validation": Example(
        program="for step, batch in enumerate(loader):\n"
        "    train_step(batch)\n"
        "    if step % 100 == 0:\n"
        "        validate(model, validation_loader)  # 60 batches",
        prints="38% of the time is validation: 10% if it is 5 times less often, or on as much less of the data; larger "
        "batches help, too.",
        cure="    if step % 1000 == 0:",
    ),
    "gc-pauses": Example(
        program=_LOOP + "    gc.collect()",
        prints="Call gc.collect() and gc.freeze() once after setup, and do not collect in the training loop; or call "
        "gc.disable() and collect every few hundred steps.",
        cure="gc.collect()\ngc.freeze()  # before the loop, and nothing in it",
    ),
    "recompiles": Example(
        program="model = torch.compile(model, dynamic=False)\n"
        "for batch in loader:  # of any length\n"
        "    loss = model(batch)",
        prints="Keep shapes and Python values constant across steps (padding, drop_last=True), or compile with "
        "dynamic=True. TORCH_LOGS=recompiles prints what changed.",
        cure="model = torch.compile(model, dynamic=True)",
    ),
    "throttled": Example(
        program="# nothing in the program: a fan of the node has failed",
        prints="Check the cooling and the power supply of GPU 0, and the GPUs next to it: it is throttled "
        "(hw_thermal). To verify: gpulaunch trace --steps 5 --rank 0.",
        cure="nvidia-smi --query-gpu=index,temperature.gpu,clocks_event_reasons.active --format=csv",
    ),
    "numa-mismatch": Example(
        program="# numactl --cpunodebind=0 for all ranks, while half of the GPUs belong to node 1",
        prints="Bind the rank to the cores of its GPU's NUMA node, so that copies do not cross the link between NUMA "
        "nodes: gpulaunch --numa-binding node.",
        cure="gpulaunch --nproc 8 --numa-binding node train.py",
    ),
}
"""By the id of the rule."""
