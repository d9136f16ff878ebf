// The `openai` client of npm at /v1/responses: node responses.mjs http://127.0.0.1:8000
// Run where `npm install openai` was run. Prints one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "any" });
const model = (await client.models.list()).data[0].id;
const request = { model, instructions: "Go on.", input: "It was a dark evening", temperature: 0 };
const tool = {
  type: "function",
  name: "get_weather",
  strict: true,
  parameters: {
    type: "object",
    properties: { rain: { type: "boolean" } },
    required: ["rain"],
    additionalProperties: false,
  },
};

const whole = await client.responses.create(request);
const kinds = [];
let text = "";
const events = await client.responses.create({ ...request, stream: true });
for await (const event of events) {
  kinds.push(event.type);
  if (event.type === "response.output_text.delta") text += event.delta;
}
const final = await client.responses.stream(request).finalResponse();
const calling = await client.responses.create({ ...request, tools: [tool], tool_choice: "required" });
const call = calling.output.find((item) => item.type === "function_call");
const result = { type: "function_call_output", call_id: call.call_id, output: "rain" };
const input = [{ role: "user", content: "Is it raining?" }, ...calling.output, result];
const next = await client.responses.create({ ...request, input, tools: [tool] });
const missing = await client.responses.retrieve(whole.id).catch((error) => error.status);
console.log(
  JSON.stringify({
    whole: whole.output_text,
    text,
    final: final.output_text,
    first: kinds[0],
    last: kinds.at(-1),
    call: [call.name, typeof JSON.parse(call.arguments).rain],
    next: next.status,
    missing,
  }),
);
