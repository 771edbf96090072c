import torch

import ddpexp

# Small synthetic digits, so that this runs anywhere in seconds; without the two lines of data, MNIST.
arguments = [
    "recipe=mnist", "model=linear", "trainer.gpus=2", "trainer.epochs=2", "run.dir=first",
    "trainer.keep_best=max:eval/accuracy", "trainer.ema_decay=0.99",
    "data.source=embedded", "data.embedded_train=1280", "data.embedded_test=200",
]  # fmt: skip
run = ddpexp.run(arguments)
print(run.status, run.result["metrics"])

run = ddpexp.open_run("first")  # later, in any process
print(run.config["trainer"]["global_batch_size"])
for record in run.metrics(frame=False)[-2:]:
    print(record["step"], record)
for checkpoint in run.checkpoints:
    print(checkpoint.step, checkpoint.is_best, checkpoint.metrics)

experiment = ddpexp.compose(arguments)
images, labels = experiment.data().evals["eval"].gather(torch.arange(8), torch.device("cpu"))
model = run.model("best", weights="ema")
print(model(images).argmax(1), labels)

fresh = experiment.model()  # with the weights that the run started with
loss, count, metrics = experiment.task().step(fresh, (images, labels))
run.load_into(fresh, weights="raw")
print(run.evaluate())

try:
    ddpexp.run([*arguments, "trainer.global_batch_size=99", "run.dir=second"])
except ddpexp.RefusedError as error:
    print(error)
